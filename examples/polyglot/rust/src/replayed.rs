//! The recorded frames and sequences of schemas/vectors, replayed.

use serde_json::{json, Map, Value};

use crate::session::{Act, Question, Session, Told};
use crate::wire;

fn vectors(name: &str) -> Value {
    let path = format!("{}/../../../schemas/vectors/{name}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Integers that JSON parsers may round are written as `{"$int": "…"}`.
fn plain(value: &Value) -> Value {
    match value {
        Value::Object(map) => match map.get("$int").and_then(Value::as_str) {
            Some(digits) => serde_json::from_str(digits).unwrap(),
            None => map.iter().map(|(key, item)| (key.clone(), plain(item))).collect::<Map<_, _>>().into(),
        },
        Value::Array(items) => items.iter().map(plain).collect(),
        other => other.clone(),
    }
}

fn bytes(vector: &Value, key: &str) -> Vec<u8> {
    let unhex = |text: &str| -> Vec<u8> {
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
    };
    match vector.get("repeat") {
        Some(repeat) if key == "bytes" => {
            let part = |key: &str| unhex(repeat[key].as_str().unwrap_or(""));
            let times = repeat["times"].as_u64().unwrap() as usize;
            [part("prefix"), part("unit").repeat(times), part("suffix")].concat()
        }
        _ => unhex(vector[key].as_str().unwrap()),
    }
}

#[test]
fn good_frames_are_read_and_written() {
    for vector in vectors("frames.json")["valid"].as_array().unwrap() {
        let name = &vector["name"];
        let mut wanted = plain(&vector["frame"]);
        let payload = wanted.as_object_mut().unwrap().remove("payload").unwrap_or(Value::Null);
        for key in ["bytes", "canonical"] {
            if vector.get(key).is_none() {
                continue;
            }
            let read = wire::frame(&bytes(vector, key)).unwrap_or_else(|why| panic!("{name}: {why}"));
            assert_eq!(read.payload, Ok(payload.clone()), "{name}");
            let read = Value::Object(read.header);
            for (field, value) in wanted.as_object().unwrap() {
                assert_eq!(&read[field], value, "{name}: {field}");
            }
            assert_eq!(wire::whole(&wire::pack(&read)), Ok(read), "{name}");
        }
    }
}

#[test]
fn bad_frames_for_a_client_are_refused() {
    let all = vectors("frames.json");
    for vector in all["bad"].as_array().unwrap() {
        let name = vector["name"].as_str().unwrap();
        if !vector["refusedBy"].as_array().unwrap().contains(&"client".into()) {
            continue;
        }
        let frame = wire::frame(&bytes(vector, "bytes"));
        match (vector["stage"].as_str().unwrap(), frame) {
            ("reference", Ok(frame)) => {
                let beside = !matches!(frame.payload, Ok(Value::Null)) || frame.text("type") != "event";
                let refused = wire::referred("/nowhere", &frame.header["blob"]);
                assert!(beside || refused.unwrap_err().0 == vector["code"], "{name}");
            }
            ("payload", Ok(frame)) if frame.payload.is_err() => {}
            ("payload", Ok(frame)) => {
                // It is what it is, and no answer of a question: whoever waits is told so.
                let told = told_of(frame);
                assert!(matches!(told, None | Some(Told::Error(_) | Told::Refused(_))), "{name}");
            }
            (_, Err(_)) => {}
            (stage, Ok(_)) => panic!("{name}: a bad {stage} was read"),
        }
    }
}

/// What a client that waits for `c` is told when this frame comes.
fn told_of(mut frame: wire::Frame) -> Option<Told> {
    frame.header.insert("inReplyTo".into(), "q".into());
    let mut session = Session::new("c".into(), 0);
    session.ask(question("e", "q"), 0);
    session.received(frame, 0).into_iter().find_map(|act| match act {
        Act::Tell(_, told) => Some(told),
        _ => None,
    })
}

fn question(event_id: &str, correlation: &str) -> Question {
    Question {
        reference: event_id.into(),
        event_id: event_id.into(),
        correlation: correlation.into(),
        to: "coder".into(),
        instance: "default".into(),
        text: "hi".into(),
        created: "2026-11-24T09:30:00Z".into(),
        deadline_ms: None,
        live: false,
        wants_answer: true,
    }
}

/// Whether a frame has the fields of `wanted`, where `$name` is any text, the same one each time.
fn fits(wanted: &Value, seen: &Value, names: &mut Map<String, Value>) -> bool {
    match wanted {
        Value::String(text) if text.starts_with('$') => {
            seen.is_string() && names.entry(text.clone()).or_insert_with(|| seen.clone()) == seen
        }
        Value::Object(map) => map.iter().all(|(key, item)| fits(item, &seen[key], names)),
        other => other == seen,
    }
}

fn filled(value: &Value, names: &Map<String, Value>) -> Value {
    match value {
        Value::String(text) => names.get(text).cloned().unwrap_or_else(|| value.clone()),
        Value::Object(map) => map.iter().map(|(key, item)| (key.clone(), filled(item, names))).collect::<Map<_, _>>().into(),
        other => other.clone(),
    }
}

/// Keep what a test can see of these acts: frames as they go out, and what askers are told.
fn seen(acts: Vec<Act>, out: &mut Vec<Value>) {
    for act in acts {
        out.push(match act {
            Act::Send(frame) => json!({ "client": frame }),
            Act::Hello { id, .. } => {
                json!({"client": {"type": "hello", "id": id, "payload": {"token": "token", "versions": [1]}}})
            }
            Act::Anew => json!({"anew": true}),
            Act::Tell(_, Told::Event(_)) => continue,
            Act::Tell(reference, Told::Answer(answer)) => json!({"told": {"eventId": reference, "response": answer["response"]}}),
            Act::Tell(reference, Told::State(state)) => json!({"told": {"eventId": reference, "state": state}}),
            Act::Tell(reference, Told::Error(error) | Told::Refused(error)) => json!({"told": {"eventId": reference, "error": error["code"]}}),
            Act::Tell(reference, Told::Accepted) => json!({"told": {"eventId": reference, "accepted": true}}),
            Act::Over { code, .. } => json!({ "over": code }),
        });
    }
}

#[test]
fn sequences_are_played() {
    let all = vectors("sequences.json");
    for sequence in all["sequences"].as_array().unwrap() {
        let name = sequence["name"].as_str().unwrap();
        let (mut session, mut now, mut names, mut out) = (Session::new("c".into(), 0), 0, Map::new(), Vec::new());
        for step in sequence["steps"].as_array().unwrap() {
            let kinds = ["broker", "client", "do", "passes", "lost", "anew", "told", "over"];
            let kind = kinds.iter().find(|kind| step.get(kind).is_some()).unwrap();
            let what = &step[kind];
            if out.first().map_or(false, |first: &Value| first["client"]["type"] == "ping") && what["type"] != "ping" {
                let pong = wire::frame(&wire::pack(&json!({"type": "pong", "inReplyTo": out.remove(0)["client"]["id"]})));
                seen(session.received(pong.unwrap(), now), &mut out);
            }
            let acts = match *kind {
                "broker" => {
                    assert!(out.is_empty(), "{name}: {out:?} before {what}");
                    let sent = wire::frame(&wire::pack(&filled(what, &names))).unwrap();
                    session.received(sent, now)
                }
                "do" => wish(&mut session, step, now),
                "passes" => {
                    now += what.as_u64().unwrap();
                    session.tick(now)
                }
                "lost" => {
                    session.connected(now);
                    Vec::new()
                }
                _ => {
                    let next = if out.is_empty() { Value::Null } else { out.remove(0) };
                    let mut wanted = json!({ *kind: what });
                    // A failed answer is an error to whoever asked.
                    if let Some(code) = wanted.get_mut("told").and_then(|told| told.as_object_mut()?.remove("failed")) {
                        wanted["told"]["error"] = code;
                    }
                    assert!(fits(&wanted, &next, &mut names), "{name}: {next} is not {wanted}");
                    if *kind == "anew" {
                        session.connected(now);
                    }
                    continue;
                }
            };
            seen(acts, &mut out);
        }
        assert!(out.is_empty(), "{name}: {out:?} at the end");
    }
}

fn wish(session: &mut Session, step: &Value, now: u64) -> Vec<Act> {
    let text = |key: &str| step[key].as_str().unwrap_or("").to_string();
    if step["do"] == "cancel" {
        return session.cancel("cancel", &text("eventId"), now);
    }
    let mut asked = question(&text("eventId"), &text("correlationId"));
    (asked.to, asked.instance, asked.text) = (text("to"), text("instanceKey"), text("text"));
    (asked.deadline_ms, asked.live) = (step["deadlineMs"].as_u64(), step["live"] == true);
    session.ask(asked, now)
}
