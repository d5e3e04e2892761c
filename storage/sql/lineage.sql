-- every input of the artifact and of all that it was made from, back to the files from outside
-- needs: upstream(), lineage
lineage(name) as table
  select u.depth, u.stage, l.name, l.kind, u.artifact, l.input from upstream(name) u join lineage l using (artifact)
  order by u.depth, u.artifact, l.name, l.input
