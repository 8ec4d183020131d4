"""Joins the parts: a configuration becomes a job, opened in stages, and a job becomes a run."""
