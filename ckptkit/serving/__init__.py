"""Serves planned outputs as the objects of a bucket, without writing them."""
