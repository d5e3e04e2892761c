-- the key of the artifact that a name means: an alias, `kind/prefix`, first digits of a key, or `stage:NAME`, the newest of a stage
-- needs: artifacts, aliases
key_of(name) as (
  -- A whole key stays as it is: DuckDB folds it to a constant, and then skips the files of other artifacts.
  case when regexp_full_match(name, '[0-9a-f]{64}') then name else (
    select case when count(*) = 1 then first(artifact) else error(name || ': fits ' || count(*) || ' artifacts') end from (
      select artifact from aliases where name in (alias, project || '/' || split_part(alias, '/', -1))
      union (select artifact from artifacts where name = 'stage:' || stage order by created_at desc, artifact desc limit 1)
      union select artifact from artifacts
      where starts_with(artifact, split_part(name, '/', -1)) and (not contains(name, '/') or kind = split_part(name, '/', 1)))) end)
