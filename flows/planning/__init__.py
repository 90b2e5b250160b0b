"""Planning the evaluation: what the plan is made from, when it is frozen, and what was seen before."""
