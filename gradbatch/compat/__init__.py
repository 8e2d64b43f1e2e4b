"""Bridges to other packages; none of them is imported before one of its functions is called."""
