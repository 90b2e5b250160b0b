"""What every selector and codec must hold: ``kvdrift check`` runs it on one's own, the tests on ours."""
