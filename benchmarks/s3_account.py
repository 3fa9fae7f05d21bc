"""The account on the server of `s3.py`, which lets everybody in."""

KEY, SECRET, REGION = "benchmark", "benchmark-secret", "us-east-1"
