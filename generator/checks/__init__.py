"""What every selector, codec and policy must hold: ``kvdrift check`` runs it on one's own, the tests on ours."""
