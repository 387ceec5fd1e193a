//! What a client does, as a state machine without sockets and clocks. Times are milliseconds of one steady clock.

use std::collections::HashSet;

use serde_json::{json, Map, Value};

use crate::wire::Frame;

/// How long a hello waits for its answer before it is said again.
const HELLO_MS: u64 = 500;
/// How long `E_PRINCIPAL_BUSY` is met with another hello.
const BUSY_MS: u64 = 10_000;
/// How long a link may be silent before it is probed, and then before it is made anew.
const SILENT_MS: u64 = 5_000;
/// How much longer than the deadline an asker waits for the broker's word about it.
const GRACE_MS: u64 = 1_000;
/// When a frame that was refused for want of room goes out again, if the broker does not say.
const RETRY_MS: u64 = 1_000;

/// What the shell around this has to do.
#[derive(Debug, PartialEq)]
pub enum Act {
    /// Send a frame, if the socket takes it.
    Send(Value),
    /// Send a hello with this id, and the token as it is now.
    Hello { id: String, awaiting: Vec<String> },
    /// Close the socket and connect with a new one.
    Anew,
    /// Tell whoever asked under this reference.
    Tell(String, Told),
    /// There is no kernel for this client: nothing more can be done.
    Over { code: String, message: String },
}

#[derive(Debug, PartialEq)]
pub enum Told {
    Answer(Value),
    Event(Value),
    Accepted,
    /// How the event ended that was to be cancelled.
    State(String),
    /// It failed.
    Error(Value),
    /// The broker did not take it.
    Refused(Value),
}

/// A question, or with `wants_answer: false` a message.
pub struct Question {
    pub reference: String,
    pub event_id: String,
    pub correlation: String,
    pub to: String,
    pub instance: String,
    pub text: String,
    pub created: String,
    pub deadline_ms: Option<u64>,
    pub live: bool,
    pub wants_answer: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Stage {
    /// Not sent to this connection, and not before this time.
    Waits(u64),
    Out,
    Accepted,
}

/// The timer of an asker: when it ends, or what is left while time stands still.
#[derive(Clone, Copy)]
enum Timer {
    None,
    Ends(u64),
    Held(u64),
}

struct Entry {
    reference: String,
    event_id: String,
    correlation: String,
    lane: (String, String),
    /// The frame without `deadlineMs`, which is another one each time.
    frame: Map<String, Value>,
    wants_answer: bool,
    /// It was sent once, so a broker may have it.
    sent: bool,
    stage: Stage,
    cancelled: bool,
    timer: Timer,
}

struct Cancel {
    id: String,
    reference: String,
    event_id: String,
    out: bool,
    not_before: u64,
}

#[derive(PartialEq)]
enum Link {
    /// The broker has not asked for hello.
    Fresh,
    /// Hello was said at this time.
    Greeting(u64),
    Ready,
}

pub struct Session {
    incarnation: String,
    counter: u64,
    link: Link,
    hello: String,
    busy_since: Option<u64>,
    credit: usize,
    outbox: Vec<Entry>,
    cancels: Vec<Cancel>,
    /// When the link was last seen to live, or something began to wait.
    quiet_since: u64,
    pinged: Option<u64>,
    /// The folder of large payloads, and whether what lies there has to survive a loss of power.
    pub blobs: String,
    pub durable: bool,
}

impl Session {
    pub fn new(incarnation: String, now: u64) -> Self {
        Session {
            incarnation,
            counter: 0,
            link: Link::Fresh,
            hello: String::new(),
            busy_since: None,
            credit: 0,
            outbox: Vec::new(),
            cancels: Vec::new(),
            quiet_since: now,
            pinged: None,
            blobs: String::new(),
            durable: true,
        }
    }

    fn id(&mut self) -> String {
        self.counter += 1;
        format!("{}.{}", self.incarnation, self.counter)
    }

    fn waits(&self) -> bool {
        !self.outbox.is_empty() || !self.cancels.is_empty() || matches!(self.link, Link::Greeting(_))
    }

    /// Something new is wanted: a link that was allowed to be silent is watched from now on.
    fn wanted(&mut self, now: u64) {
        if !self.waits() {
            self.quiet_since = now;
        }
    }

    /// Whether somebody waits for this answer: only then its payload is worth reading.
    pub fn awaits(&self, correlation: &str) -> bool {
        self.outbox.iter().any(|entry| entry.wants_answer && entry.correlation == correlation)
    }

    /// Whether this event is still asked for.
    pub fn holds(&self, event_id: &str) -> bool {
        self.outbox.iter().any(|entry| entry.event_id == event_id)
    }

    /// An event cannot be sent.
    pub fn fail(&mut self, event_id: &str, code: &str, message: &str) -> Vec<Act> {
        let at = self.outbox.iter().position(|entry| entry.event_id == event_id);
        let told = Told::Error(error(code, message));
        at.map(|at| Act::Tell(self.outbox.remove(at).reference, told)).into_iter().collect()
    }

    pub fn ask(&mut self, asked: Question, now: u64) -> Vec<Act> {
        self.wanted(now);
        let mut frame = Map::new();
        frame.insert("type".into(), "event".into());
        frame.insert("id".into(), self.id().into());
        frame.insert("to".into(), asked.to.clone().into());
        frame.insert("instanceKey".into(), asked.instance.clone().into());
        frame.insert("eventId".into(), asked.event_id.clone().into());
        if asked.wants_answer {
            frame.insert("replyTo".into(), json!({"target": "client", "correlationId": asked.correlation}));
        }
        if asked.live {
            frame.insert("live".into(), true.into());
        }
        frame.insert(
            "payload".into(),
            json!({"id": asked.event_id, "type": "user.message", "createdAt": asked.created, "input": asked.text}),
        );
        self.outbox.push(Entry {
            reference: asked.reference,
            event_id: asked.event_id,
            correlation: asked.correlation,
            lane: (asked.to, asked.instance),
            frame,
            wants_answer: asked.wants_answer,
            sent: false,
            stage: Stage::Waits(0),
            cancelled: false,
            timer: asked.deadline_ms.map_or(Timer::None, |left| Timer::Ends(now + left)),
        });
        self.flush(now)
    }

    /// Give an event up. `reference` is told how it ended.
    pub fn cancel(&mut self, reference: &str, event_id: &str, now: u64) -> Vec<Act> {
        self.wanted(now);
        let mut acts = Vec::new();
        let at = self.outbox.iter().position(|entry| entry.event_id == event_id);
        if let Some(at) = at {
            self.outbox[at].cancelled = true;
            // Refused for a while: it is not sent again. The wish goes out, for a broker that took an earlier sending.
            let refused = matches!(self.outbox[at].stage, Stage::Waits(again) if again > 0);
            if !self.outbox[at].sent {
                return vec![self.drop_cancelled(at), Act::Tell(reference.into(), Told::State("cancelled".into()))];
            }
            if refused {
                acts.push(self.drop_cancelled(at));
            }
        }
        let id = self.id();
        let (reference, event_id) = (reference.into(), event_id.into());
        self.cancels.push(Cancel { id, reference, event_id, out: false, not_before: 0 });
        acts.extend(self.flush(now));
        acts
    }

    fn drop_cancelled(&mut self, at: usize) -> Act {
        let entry = self.outbox.remove(at);
        Act::Tell(entry.reference, Told::Error(error("E_CANCELLED", "it was given up before anybody had it")))
    }

    /// A new socket is there.
    pub fn connected(&mut self, now: u64) {
        self.link = Link::Fresh;
        self.quiet_since = now;
        self.pinged = None;
    }

    /// Everything that may go out now, oldest first.
    fn flush(&mut self, now: u64) -> Vec<Act> {
        let mut acts = Vec::new();
        if self.link != Link::Ready {
            return acts;
        }
        let mut out = self.outbox.iter().filter(|entry| entry.stage == Stage::Out).count();
        let mut held: HashSet<(String, String)> = HashSet::new();
        for entry in &mut self.outbox {
            if let Stage::Waits(not_before) = entry.stage {
                if !held.contains(&entry.lane) && not_before <= now && out < self.credit {
                    out += 1;
                    entry.stage = Stage::Out;
                    entry.sent = true;
                    let mut frame = entry.frame.clone();
                    match entry.timer {
                        Timer::None => None,
                        Timer::Ends(at) => Some(at.saturating_sub(now).max(1)),
                        Timer::Held(left) => Some(left.max(1)),
                    }
                    .map(|left| frame.insert("deadlineMs".into(), left.into()));
                    acts.push(Act::Send(frame.into()));
                }
            }
            // What is later for the same agent and instance keeps its place behind it.
            if matches!(entry.stage, Stage::Waits(_)) {
                held.insert(entry.lane.clone());
            }
        }
        let outbox = &self.outbox;
        for cancel in &mut self.cancels {
            // Behind its event, or it would end nothing.
            let early = outbox.iter().any(|e| e.event_id == cancel.event_id && matches!(e.stage, Stage::Waits(_)));
            if !cancel.out && cancel.not_before <= now && !early {
                cancel.out = true;
                acts.push(Act::Send(
                    json!({"type": "admin", "id": cancel.id, "payload": {"op": "cancel", "eventId": cancel.event_id}}),
                ));
            }
        }
        acts
    }

    pub fn received(&mut self, frame: Frame, now: u64) -> Vec<Act> {
        self.quiet_since = now;
        self.pinged = None;
        let answers = frame.text("inReplyTo").to_string();
        let mut acts = Vec::new();
        match frame.text("type") {
            "error" => acts.extend(self.refused(&frame, &answers, now)),
            "welcome" if matches!(self.link, Link::Greeting(_)) && frame.field("credit").is_u64() => {
                if frame.field("version") != 1 {
                    let message = "the kernel speaks another version".to_string();
                    return vec![Act::Over { code: "E_VERSION".into(), message }];
                }
                self.link = Link::Ready;
                self.busy_since = None;
                self.blobs = frame.field("blobs").as_str().unwrap_or("").into();
                self.durable = frame.field("durability") != "process";
                self.credit = frame.field("credit").as_u64().unwrap_or(0) as usize;
                for entry in &mut self.outbox {
                    entry.stage = Stage::Waits(0);
                    if let Timer::Held(left) = entry.timer {
                        entry.timer = Timer::Ends(now + left);
                    }
                }
                for cancel in &mut self.cancels {
                    (cancel.out, cancel.not_before) = (false, 0);
                }
            }
            "ping" => acts.push(Act::Send(json!({"type": "pong", "inReplyTo": frame.text("id")}))),
            "credit" => {
                if let Some(window) = frame.field("window").as_u64() {
                    self.credit = window as usize;
                }
            }
            "ack" if frame.text("stage") == "accepted" => {
                if let Some(at) = self.sent_as(&answers) {
                    if self.outbox[at].wants_answer {
                        self.outbox[at].stage = Stage::Accepted;
                    } else {
                        acts.push(Act::Tell(self.outbox.remove(at).reference, Told::Accepted));
                    }
                }
            }
            "event" => {
                acts.push(Act::Send(json!({
                    "type": "ack", "stage": "done", "eventId": frame.text("eventId"), "inReplyTo": frame.text("id"),
                })));
                if let Some(at) = self.asked_as(&answers) {
                    let told = match &frame.payload {
                        Ok(payload) if payload["answer"]["status"] == "completed" => Told::Answer(payload["answer"].clone()),
                        Ok(payload) if payload["answer"]["status"] == "failed" => Told::Error(payload["answer"]["error"].clone()),
                        Ok(_) => Told::Error(error("E_FRAME_INVALID", "the answer is none")),
                        Err((code, why)) => Told::Error(error(code, why)),
                    };
                    acts.push(Act::Tell(self.outbox.remove(at).reference, told));
                }
            }
            "runtime.event" => {
                if let (Some(at), Ok(news)) = (self.asked_as(&answers), &frame.payload) {
                    acts.push(Act::Tell(self.outbox[at].reference.clone(), Told::Event(news.clone())));
                }
            }
            "reply" => {
                if let Some(at) = self.cancels.iter().position(|cancel| cancel.id == answers) {
                    let state = frame.field("state").as_str().unwrap_or("").to_string();
                    acts.push(Act::Tell(self.cancels.remove(at).reference, Told::State(state)));
                }
            }
            "clock" => {
                if let Some(at) = self.asked_as(&answers) {
                    self.clock(at, frame.text("stage"), frame.header.get("deadlineMs").and_then(Value::as_u64), now);
                }
            }
            _ => {}
        }
        acts.extend(self.flush(now));
        acts
    }

    fn sent_as(&self, id: &str) -> Option<usize> {
        self.outbox.iter().position(|entry| entry.frame["id"] == id)
    }

    fn asked_as(&self, correlation: &str) -> Option<usize> {
        self.outbox.iter().position(|entry| entry.wants_answer && entry.correlation == correlation)
    }

    fn clock(&mut self, at: usize, stage: &str, left: Option<u64>, now: u64) {
        let timer = &mut self.outbox[at].timer;
        let own = match *timer {
            Timer::None => return,
            Timer::Ends(at) => at.saturating_sub(now),
            Timer::Held(left) => left,
        };
        let left = left.unwrap_or(own);
        match stage {
            "held" => *timer = Timer::Held(left),
            "runs" => *timer = Timer::Ends(now + left),
            _ => {}
        }
    }

    fn refused(&mut self, frame: &Frame, answers: &str, now: u64) -> Vec<Act> {
        let code = frame.field("code").as_str().unwrap_or("").to_string();
        let told = || Told::Refused(frame.payload.clone().unwrap_or_else(|(code, why)| error(code, &why)));
        if code == "E_HELLO_REQUIRED" {
            // With `inReplyTo` it answers a frame that came too early, which goes out again after the welcome.
            return if answers.is_empty() { self.greet(true, now) } else { Vec::new() };
        }
        if !answers.is_empty() && answers == self.hello {
            if code == "E_PRINCIPAL_BUSY" && now.saturating_sub(*self.busy_since.get_or_insert(now)) < BUSY_MS {
                return Vec::new(); // said again after half a second
            }
            let message = frame.field("message").as_str().unwrap_or("").to_string();
            return vec![Act::Over { code, message }];
        }
        let again = now + frame.field("retryAfterMs").as_u64().unwrap_or(RETRY_MS);
        if let Some(at) = self.cancels.iter().position(|cancel| cancel.id == answers) {
            if code == "E_OVERLOADED" {
                (self.cancels[at].out, self.cancels[at].not_before) = (false, again);
                return Vec::new();
            }
            return vec![Act::Tell(self.cancels.remove(at).reference, told())];
        }
        match self.sent_as(answers) {
            Some(at) if code == "E_OVERLOADED" && self.outbox[at].cancelled => vec![self.drop_cancelled(at)],
            Some(at) if code == "E_OVERLOADED" => {
                self.outbox[at].stage = Stage::Waits(again);
                Vec::new()
            }
            Some(at) => vec![Act::Tell(self.outbox.remove(at).reference, told())],
            None => Vec::new(),
        }
    }

    fn greet(&mut self, anew: bool, now: u64) -> Vec<Act> {
        if anew {
            self.hello = self.id();
        }
        self.link = Link::Greeting(now);
        let awaiting = self.outbox.iter().filter(|e| e.wants_answer).map(|e| e.correlation.clone()).collect();
        vec![Act::Hello { id: self.hello.clone(), awaiting }]
    }

    /// Time has passed.
    pub fn tick(&mut self, now: u64) -> Vec<Act> {
        let mut acts = Vec::new();
        let over = |timer: Timer| matches!(timer, Timer::Ends(at) if at + GRACE_MS <= now);
        while let Some(at) = self.outbox.iter().position(|entry| over(entry.timer)) {
            let late = Told::Error(error("E_AGENT_TIMEOUT", "no answer in time"));
            acts.push(Act::Tell(self.outbox.remove(at).reference, late));
        }
        if matches!(self.link, Link::Greeting(said) if said + HELLO_MS <= now) {
            acts.extend(self.greet(false, now));
        }
        if self.waits() && self.quiet_since + SILENT_MS <= now {
            match self.pinged {
                None => {
                    self.pinged = Some(now);
                    // Without an id: a broker that does not know this connection asks for hello then.
                    acts.push(Act::Send(json!({"type": "ping"})));
                }
                Some(at) if at + SILENT_MS <= now => acts.push(Act::Anew),
                Some(_) => {}
            }
        }
        acts.extend(self.flush(now));
        acts
    }

    /// When `tick` has something to do next.
    pub fn next(&self, now: u64) -> Option<u64> {
        let timers = self.outbox.iter().filter_map(|entry| match entry.timer {
            Timer::Ends(at) => Some(at + GRACE_MS),
            _ => None,
        });
        let refused = self.outbox.iter().filter_map(|entry| match entry.stage {
            Stage::Waits(at) if at > now => Some(at),
            _ => None,
        });
        let cancels = self.cancels.iter().filter(|c| !c.out && c.not_before > now).map(|c| c.not_before);
        let hello = match self.link {
            Link::Greeting(said) => Some(said + HELLO_MS),
            _ => None,
        };
        let silence = self.waits().then(|| self.pinged.unwrap_or(self.quiet_since) + SILENT_MS);
        timers.chain(refused).chain(cancels).chain(hello).chain(silence).min()
    }
}

fn error(code: &str, message: &str) -> Value {
    json!({"code": code, "message": message})
}
