"""What CI jobs call: wheels of a pull request, comments and published history."""
