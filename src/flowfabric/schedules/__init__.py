"""Calendars and the schedules that programs declare."""
