"""From live objects to a committed step."""
