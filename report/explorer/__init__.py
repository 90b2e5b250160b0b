"""The trajectory explorer: trajectories as text on one page beside the report.

``page`` writes it: ``sample`` chooses trajectories by a rule, ``outcomes`` and ``streams`` read them from the views,
and ``packing`` encodes them as texts that a page holds.
"""
