"""Alarms: changes of acceptance and their suspected causes."""
