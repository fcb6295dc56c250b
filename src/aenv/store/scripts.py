"""What runs inside Redis: each script is one step that nobody sees half of.

All keys lie below ``KEYS[1]``, whose braces put them into one hash slot. Their parts are separated by NUL, which no
name may hold. For each kind there are

    records     key -> what Python packed                  revisions   key -> revision
    tags        key -> the tags that it bears, packed      search      key -> the text to look in
    ranks       keys by minus their order, so that ties are by key
    keys        keys in their own order                    tag         the same as ranks, for one value of one tag
    numbers     key -> what was added up there, packed     changed     keys by their revision

and besides ``kinds``, ``expiring`` (kind and key by the time of their end), ``revision`` (the last one that was given),
``schema`` and ``done`` (what a change was answered, for when the answer was lost). A page of records is answered in two
pieces, the records one after the other in the second: a client in Python takes longer to read three hundred pieces than
Redis to find them.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

REMEMBERED = 60
"""Seconds for which a change is known to be done."""


class Script(NamedTuple):
    text: str
    sha: str


_COMMON = """
local function at(...)
  return KEYS[1] .. table.concat({...}, '\\0')
end

local function now()
  local time = redis.call('TIME')
  return time[1] + time[2] / 1000000
end

local function untag(kind, key)
  local tags = redis.call('HGET', at('tags', kind), key)
  if tags then
    for _, tag in ipairs(cmsgpack.unpack(tags)) do
      redis.call('ZREM', at('tag', kind, tag), key)
    end
    redis.call('HDEL', at('tags', kind), key)
  end
end

local function remove(kind, key)
  untag(kind, key)
  redis.call('HDEL', at('records', kind), key)
  redis.call('HDEL', at('revisions', kind), key)
  redis.call('HDEL', at('search', kind), key)
  redis.call('ZREM', at('ranks', kind), key)
  redis.call('ZREM', at('keys', kind), key)
  redis.call('ZREM', at('changed', kind), key)
  redis.call('ZREM', at('expiring'), kind .. '\\0' .. key)
  if redis.call('EXISTS', at('revisions', kind)) == 0 then
    redis.call('ZREM', at('kinds'), kind)
  end
end

local function sweep()
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', at('expiring'), '-inf', now())) do
    local nul = string.find(member, '\\0', 1, true)
    remove(string.sub(member, 1, nul - 1), string.sub(member, nul + 1))
  end
end

local function added(numbers, adds)
  for _, add in ipairs(adds) do
    local name, amount, floor, most = unpack(add)
    local value = numbers[name] or 0
    if floor and value < floor then
      value = floor
    end
    value = value + amount
    if most and amount > 0 and value > most then
      return name
    end
    numbers[name] = value ~= 0 and value or nil
  end
end

local function fetched(kind, keys)
  local revisions, records, sizes = {}, {}, {}
  if #keys > 0 then
    revisions = redis.call('HMGET', at('revisions', kind), unpack(keys))
    records = redis.call('HMGET', at('records', kind), unpack(keys))
  end
  for place, record in ipairs(records) do
    sizes[place] = #record
  end
  return {cmsgpack.pack({keys, revisions, sizes}), table.concat(records)}
end
"""


def _script(body: str) -> Script:
    text = _COMMON + body
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


OPEN = _script("""
redis.call('SETNX', at('schema'), ARGV[1])
return redis.call('GET', at('schema'))
""")

GET = _script("""
local kind, key = ARGV[1], ARGV[2]
local ends = redis.call('ZSCORE', at('expiring'), kind .. '\\0' .. key)
if ends and tonumber(ends) <= now() then
  return {false, false}
end
return {redis.call('HGET', at('revisions', kind), key), redis.call('HGET', at('records', kind), key)}
""")

CHANGE = _script("""
local done = at('done', ARGV[1])
local answer = redis.call('GET', done)
if answer then
  return {'done', cmsgpack.unpack(answer)}
end
sweep()
local changes = cmsgpack.unpack(ARGV[3])
local counted = {}
for place, change in ipairs(changes) do
  if change.adds then
    local name = change.kind .. '\\0' .. change.key
    if not counted[name] then
      local packed = redis.call('HGET', at('numbers', change.kind), change.key)
      counted[name] = packed and cmsgpack.unpack(packed) or {}
    end
    local full = added(counted[name], change.adds)
    if full then
      return {'full', place, full}
    end
  else
    local there = redis.call('HGET', at('revisions', change.kind), change.key) or '0'
    if change.expect ~= '' and change.expect ~= there then
      return {'conflict', place, there}
    end
  end
end
local revisions = {}
for place, change in ipairs(changes) do
  local kind, key = change.kind, change.key
  local record = ARGV[place + 3]
  if change.adds then
    local numbers = counted[kind .. '\\0' .. key]
    if next(numbers) then
      redis.call('HSET', at('numbers', kind), key, cmsgpack.pack(numbers))
    else
      redis.call('HDEL', at('numbers', kind), key)
    end
    revisions[place] = '0'
  elseif record == '' then
    remove(kind, key)
    revisions[place] = '0'
  else
    revisions[place] = string.format('%.0f', redis.call('INCR', at('revision')))
    untag(kind, key)
    redis.call('HSET', at('records', kind), key, record)
    redis.call('HSET', at('revisions', kind), key, revisions[place])
    redis.call('ZADD', at('ranks', kind), change.rank, key)
    redis.call('ZADD', at('keys', kind), 0, key)
    redis.call('ZADD', at('changed', kind), revisions[place], key)
    redis.call('ZADD', at('kinds'), 0, kind)
    if #change.tags > 0 then
      redis.call('HSET', at('tags', kind), key, cmsgpack.pack(change.tags))
      for _, tag in ipairs(change.tags) do
        redis.call('ZADD', at('tag', kind, tag), change.rank, key)
      end
    end
    if change.search ~= '' then
      redis.call('HSET', at('search', kind), key, change.search)
    else
      redis.call('HDEL', at('search', kind), key)
    end
    if change.expires ~= '' then
      redis.call('ZADD', at('expiring'), change.expires, kind .. '\\0' .. key)
    else
      redis.call('ZREM', at('expiring'), kind .. '\\0' .. key)
    end
  end
end
redis.call('SET', done, cmsgpack.pack(revisions), 'EX', ARGV[2])
return {'done', revisions}
""")

FIND = _script("""
local kind, text, limit, offset = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
sweep()

local made = {}
local function stored(command, sources)
  local target = at('found', #made)
  local call = {command, target, #sources}
  for _, source in ipairs(sources) do
    call[#call + 1] = source
  end
  call[#call + 1] = 'AGGREGATE'
  call[#call + 1] = 'MIN'
  redis.call(unpack(call))
  made[#made + 1] = target
  return target
end

local sets = {}
for _, tags in ipairs(cmsgpack.unpack(ARGV[5])) do
  local any = {}
  for place, tag in ipairs(tags) do
    any[place] = at('tag', kind, tag)
  end
  sets[#sets + 1] = #any == 1 and any[1] or stored('ZUNIONSTORE', any)
end
local source = at('ranks', kind)
if #sets > 0 then
  source = #sets == 1 and sets[1] or stored('ZINTERSTORE', sets)
end

local total, page = 0, {}
if text == '' then
  total = redis.call('ZCARD', source)
  if limit > 0 then
    page = redis.call('ZRANGE', source, offset, offset + limit - 1)
  end
else
  local keys = redis.call('ZRANGE', source, 0, -1)
  for first = 1, #keys, 1000 do
    local last = math.min(first + 999, #keys)
    for place, found in ipairs(redis.call('HMGET', at('search', kind), unpack(keys, first, last))) do
      if found and string.find(found, text, 1, true) then
        total = total + 1
        if total > offset and #page < limit then
          page[#page + 1] = keys[first + place - 1]
        end
      end
    end
  end
end
if #made > 0 then
  redis.call('UNLINK', unpack(made))
end
return {total, fetched(kind, page)}
""")

SCAN = _script("""
sweep()
local after = ARGV[2] == '' and '-' or '(' .. ARGV[2]
return fetched(ARGV[1], redis.call('ZRANGEBYLEX', at('keys', ARGV[1]), after, '+', 'LIMIT', 0, ARGV[3]))
""")

SINCE = _script("""
sweep()
local kind, keys = ARGV[1], {}
local changed = redis.call('ZRANGEBYSCORE', at('changed', kind), '(' .. ARGV[2], '+inf', 'LIMIT', 0, ARGV[3])
for _, key in ipairs(changed) do
  if redis.call('HEXISTS', at('revisions', kind), key) == 1 then
    keys[#keys + 1] = key
  else  -- a server that does not know of this removed it
    redis.call('ZREM', at('changed', kind), key)
  end
end
return fetched(kind, keys)
""")

COUNTS = _script("""
return redis.call('HGETALL', at('numbers', ARGV[1]))
""")

KINDS = _script("""
sweep()
return redis.call('ZRANGE', at('kinds'), 0, -1)
""")
