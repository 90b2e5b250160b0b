"""Events to trajectories and steps: pure derivation, the Beam pipeline around it, and its live form."""
