"""What ``make bench`` runs."""
