"""What a study lacks of events, and who generates them: this process, or processes beside it."""
