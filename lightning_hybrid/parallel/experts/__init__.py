"""Experts split over a part of the data axis."""
