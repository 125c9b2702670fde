"""The gateway: joins clients, targets and drafts. No torch here."""
