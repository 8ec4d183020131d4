"""Joins the parts: a configuration becomes a Run; resumption, checks before the first step."""
