"""Values and arithmetic; nothing here touches a file."""
