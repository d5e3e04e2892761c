-- the artifact and all that it was made from, with the steps in between
-- needs: key_of(), artifacts, lineage
upstream(name) as table
  with recursive up(artifact, depth) as (
    select key_of(name), 0 union select l.input, depth + 1 from up join lineage l using (artifact) where l.kind != 'external')
  select artifact, min(depth) as depth, any_value(kind) as kind, any_value(stage) as stage, any_value(rows) as rows
  from up left join artifacts using (artifact) group by artifact order by depth, artifact
