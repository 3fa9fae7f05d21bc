"""One checkpoint in, one model out: preparing, writing, checking and comparing."""
