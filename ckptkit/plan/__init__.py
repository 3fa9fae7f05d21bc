"""From a request to a plan: pure functions of frozen values."""
