"""Words of the whole house: tables, studies, documents, errors."""
