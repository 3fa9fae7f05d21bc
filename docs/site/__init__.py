"""Builds the documentation site: what `mkdocs.yml` names, and pages that are made of the code."""
