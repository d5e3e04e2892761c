-- the documents that only one of two artifacts has, and those whose text differs
-- needs: key_of(), documents
diff(before, after) as table
  select coalesce(a.id, b.id) as id,
    case when b.id is null then 'only before' when a.id is null then 'only after' else 'changed' end as what,
    coalesce(a.url, b.url) as url, a.text as text_before, b.text as text_after
  from (select * from documents where artifact = key_of(before)) a
  full join (select * from documents where artifact = key_of(after)) b using (id)
  where a.id is null or b.id is null or a.text != b.text
