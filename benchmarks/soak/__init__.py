"""Long runs, which fail when an answer is wrong or something keeps growing."""
