"""What the `ckptkit adapter` commands do: extract, merge, and make an adapter of a difference."""
