-- what became of a document, named by its id, the first digits of it, or its address: a row for each stage that has it
-- needs: artifacts, addresses, pages, documents, signals, dropped, duplicates, removed_lines, mixture
fate(document) as table
  with ids as materialized (
    select id from addresses where id >= document and id < document || 'g' union select id from addresses where url = document),
  found as (
    select artifact, id, 'page' as what, url as detail from pages where id in (from ids)
    union all select artifact, id, 'kept', length(text) || ' characters' from documents where id in (from ids)
    union all select artifact, id, 'scored', json_merge_patch('{}', to_json(s), '{"artifact": null, "id": null}')::varchar
      from signals s where id in (from ids)
    union all select artifact, id, 'dropped', concat(rule, ': ', value, ' against ', threshold, ' ', detail)
      from dropped where id in (from ids)
    union all select artifact, id, 'duplicate', concat(method, ', ', similarity, ', of ', kept_id) from duplicates where id in (from ids)
    union all select artifact, id, 'line removed', concat(rule, ': ', text) from removed_lines where id in (from ids)
    union all select artifact, id, 'mixed', concat(split, ', ', category, ', read ', repeats, ' times') from mixture where id in (from ids))
  select a.stage, f.what, f.detail, f.artifact, f.id from found f left join artifacts a using (artifact)
  order by a.created_at, f.artifact
