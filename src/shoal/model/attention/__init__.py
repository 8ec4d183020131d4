"""Attention: who reads whom, one softmax, and its forms for rows and for caches."""
