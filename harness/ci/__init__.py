"""Commands of CI jobs: wheels of a pull request, comments and published history."""
