"""The stages wired together: open, inspect, consolidate, convert, verify, diff."""
