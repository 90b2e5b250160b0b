"""What every selector must hold, whatever it scores by: ``kvdrift check`` runs it on one's own, the tests on ours."""
