"""Views of a run: what a person or another program makes of its columns."""
