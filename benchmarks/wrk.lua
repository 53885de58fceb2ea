-- The load of benchmarks/serving.py. Arguments: a file with one JSON body per line, and how many answers to wait for.
-- Prints "began" at the first request, "ended" at the last counted answer, and after an interrupt what wrk measured. wrk
-- corrects its percentiles for coordinated omission: a long latency counts as several.

local bodies, sent, answered, awaited = {}, 0, 0, 0

function init(arguments)
  wrk.headers["Content-Type"] = "application/json"
  for body in io.lines(arguments[1]) do
    bodies[#bodies + 1] = wrk.format("POST", nil, nil, body)
  end
  awaited = tonumber(arguments[2])
end

local function say(word)
  io.write(word, "\n")
  io.flush()
end

function request()
  if sent == 1 then -- the call before only shows wrk what a request is
    say("began")
  end
  sent = sent + 1
  return bodies[(sent - 1) % #bodies + 1] -- more than awaited are sent, so that no connection is idle before the end
end

function response(status)
  if status ~= 200 then
    say("status " .. status)
  end
  answered = answered + 1
  if answered == awaited then
    say("ended")
  end
end

function done(_, latency)
  say(string.format('{"p50": %f, "p99": %f}', latency:percentile(50) / 1e6, latency:percentile(99) / 1e6))
end
