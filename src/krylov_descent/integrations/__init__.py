"""Integrations run KSD inside other frameworks: one module for each, which alone imports that framework."""
