"""Self-contained HTML pages that show a checkpoint, a run, or the difference of two models.

`documents` plans what a page shows, as plain values; `page` renders it and writes it.
"""
