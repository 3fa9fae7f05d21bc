"""The process that persists saves: standard library only, never torch or numpy."""
