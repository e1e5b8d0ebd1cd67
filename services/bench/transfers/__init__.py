"""Benches of bare transfers: writes, pages, scatters, messages, notifications, and all ranks at once."""
