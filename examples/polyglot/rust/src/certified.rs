//! The line protocol of `gdn certify client`: JSON lines say what to do, JSON lines say what came of it.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::io::FromRawFd;

use serde_json::{json, Value};

use crate::link::{Link, Over};
use crate::session::Told;

fn say(line: Value) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn tell(events: &mut HashMap<String, String>, told: Vec<(String, Told)>) {
    for (reference, what) in told {
        let (key, value) = match what {
            Told::Event(news) => {
                say(json!({"ref": reference, "event": news}));
                continue;
            }
            Told::State(_) => continue,
            // The wish to cancel has no line of its own.
            Told::Error(_) | Told::Refused(_) if !events.contains_key(&reference) => continue,
            Told::Answer(answer) => ("answer", answer),
            Told::Accepted => ("accepted", true.into()),
            Told::Error(error) | Told::Refused(error) => ("error", error),
        };
        events.remove(&reference);
        say(json!({"ref": reference, key: value}));
    }
}

pub fn run(run_dir: &str) -> Result<(), Over> {
    let mut link = Link::open(run_dir).map_err(|why| Over { code: "E_CONNECT".into(), message: why.to_string() })?;
    // Not std::io::stdin, which reads ahead: what it holds no poll would see.
    let mut lines = unsafe { File::from_raw_fd(0) };
    let mut rest = Vec::new();
    // The event of each reference that waits.
    let mut events = HashMap::new();
    say(json!({"ready": true}));
    loop {
        let (told, readable) = link.wait(Some(0))?;
        tell(&mut events, told);
        if !readable {
            continue;
        }
        let mut chunk = [0; 65536];
        let read = lines.read(&mut chunk).unwrap_or(0);
        rest.extend_from_slice(&chunk[..read]);
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            let wish: Value = serde_json::from_slice(&line).unwrap_or(Value::Null);
            let text = |key: &str| wish[key].as_str().unwrap_or("");
            let reference = text("ref");
            match text("do") {
                kind @ ("ask" | "stream" | "send") => {
                    let instance = wish["instance"].as_str().unwrap_or("default");
                    let (live, answered) = (kind == "stream", kind != "send");
                    let deadline = wish["deadlineMs"].as_u64();
                    let (event_id, told) =
                        link.ask(reference, text("to"), text("text"), instance, deadline, live, answered)?;
                    events.insert(reference.to_string(), event_id);
                    tell(&mut events, told);
                }
                "cancel" => {
                    if let Some(event_id) = events.get(reference).cloned() {
                        let told = link.cancel(&format!("cancel {reference}"), &event_id)?;
                        tell(&mut events, told);
                    }
                }
                "close" => {
                    link.close();
                    return Ok(());
                }
                _ => say(json!({"ref": reference, "unsupported": true})),
            }
        }
        if read == 0 {
            link.close();
            return Ok(());
        }
    }
}
