"""What a study lacks of events, and who generates them: this process, a second one beside it, services."""
