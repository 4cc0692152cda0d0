#!/bin/sh
# Commits the new files of results/history and pushes them to BRANCH, or (PUBLISH_BY=pull-request) opens a pull request by
# `gh`, which reads GH_TOKEN. A history only grows: a file that was changed or removed ends it.
set -eu
folder=results/history branch=${BRANCH:-main} by=${PUBLISH_BY:-commit}
case $by in commit | pull-request) ;; *)
  echo "PUBLISH_BY is '$by': choose commit or pull-request." >&2
  exit 2
  ;;
esac
changed=$(git status --porcelain --untracked-files=all -- "$folder" | grep -v '^??' || true)
if [ -n "$changed" ]; then
  printf 'A history only grows, but this was changed or removed; restore it by git checkout:\n%s\n' "$changed" >&2
  exit 2
fi
git add -- "$folder"
if git diff --cached --quiet -- "$folder"; then
  echo "No new run: nothing to publish."
  exit 0
fi
title="History: runs of $(date -u +%Y-%m-%d)"
export GIT_AUTHOR_NAME=dpbench GIT_COMMITTER_NAME=dpbench
export GIT_AUTHOR_EMAIL='github-actions[bot]@users.noreply.github.com' GIT_COMMITTER_EMAIL='github-actions[bot]@users.noreply.github.com'
git commit --quiet --message "$title" -- "$folder"
if [ "$by" = pull-request ]; then
  topic=history/$(date -u +%Y%m%d-%H%M%S)
  git push --quiet origin "HEAD:refs/heads/$topic"
  gh pr create --base "$branch" --head "$topic" --title "$title" --body "New runs only."
  exit 0
fi
for _ in 1 2 3; do
  if git push --quiet origin "HEAD:refs/heads/$branch"; then
    echo "$title: pushed to $branch."
    exit 0
  fi
  # Somebody pushed meanwhile; a file per run cannot conflict.
  git fetch --quiet origin "$branch"
  git rebase --quiet FETCH_HEAD
done
git push --quiet origin "HEAD:refs/heads/$branch"
