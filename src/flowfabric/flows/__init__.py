"""Flows as programs build and watch them."""
