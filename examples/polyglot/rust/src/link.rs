//! A session on a real socket: what it decides is done here.

use std::collections::{HashMap, VecDeque};
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::io::RawFd;
use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::{json, Value};

use crate::session::{Act, Question, Session, Told};
use crate::wire;

/// How long frames may still go out after an orderly end.
const LINGER_MS: i32 = 500;
/// What a frame may be longer where it arrives: what the broker adds to its header.
const ADDED: i64 = 64 << 10;

/// There is no kernel for this client.
pub struct Over {
    pub code: String,
    pub message: String,
}

pub struct Link {
    run_dir: String,
    context: zmq::Context,
    socket: zmq::Socket,
    session: Session,
    incarnation: String,
    start: Instant,
    /// Frames for which the socket had no room; a new connection needs none of them.
    unsent: VecDeque<Vec<u8>>,
    /// Event id -> the file of a question that is too large for a frame.
    large: HashMap<String, Value>,
}

impl Link {
    pub fn open(run_dir: &str) -> zmq::Result<Link> {
        let (context, incarnation) = (zmq::Context::new(), random(6));
        let socket = connect(&context, run_dir)?;
        Ok(Link {
            run_dir: run_dir.into(),
            context,
            socket,
            session: Session::new(incarnation.clone(), 0),
            incarnation,
            start: Instant::now(),
            unsent: VecDeque::new(),
            large: HashMap::new(),
        })
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// Ask an agent, or tell it something. What comes of it is told under `reference`. Gives the event's id.
    #[allow(clippy::too_many_arguments)]
    pub fn ask(
        &mut self,
        reference: &str,
        agent: &str,
        text: &str,
        instance: &str,
        deadline_ms: Option<u64>,
        live: bool,
        wants_answer: bool,
    ) -> Result<(String, Vec<(String, Told)>), Over> {
        let event_id = random(8);
        let question = Question {
            reference: reference.into(),
            event_id: event_id.clone(),
            correlation: random(8),
            to: agent.into(),
            instance: instance.into(),
            text: text.into(),
            created: rfc3339(),
            deadline_ms,
            live,
            wants_answer,
        };
        let acts = self.session.ask(question, self.now());
        Ok((event_id, self.act(acts)?))
    }

    pub fn cancel(&mut self, reference: &str, event_id: &str) -> Result<Vec<(String, Told)>, Over> {
        let acts = self.session.cancel(reference, event_id, self.now());
        self.act(acts)
    }

    /// Wait until something is told, or `other` can be read. Gives what was told, and whether it can.
    pub fn wait(&mut self, other: Option<RawFd>) -> Result<(Vec<(String, Told)>, bool), Over> {
        let acts = self.session.tick(self.now());
        let mut told = self.act(acts)?;
        let now = self.now();
        let wait = match self.session.next(now) {
            _ if !told.is_empty() => 0,
            Some(at) => at.saturating_sub(now) as i64,
            None => -1,
        };
        let events = if self.unsent.is_empty() { zmq::POLLIN } else { zmq::POLLIN | zmq::POLLOUT };
        let mut items = vec![self.socket.as_poll_item(events)];
        items.extend(other.map(|fd| zmq::PollItem::from_fd(fd, zmq::POLLIN)));
        let readable = match zmq::poll(&mut items, wait) {
            // A handler of a signal ran: whoever waits looks at what it has done.
            Err(_) => return Ok((told, false)),
            Ok(_) => items.get(1).map_or(false, |item| !item.get_revents().is_empty()),
        };
        self.push();
        while let Ok(parts) = self.socket.recv_multipart(zmq::DONTWAIT) {
            // An empty part is no frame, and a frame has one part.
            if parts.len() != 1 || parts[0].is_empty() {
                continue;
            }
            match wire::frame(&parts[0]) {
                Ok(frame) => {
                    let frame = self.opened(frame);
                    let acts = self.session.received(frame, self.now());
                    told.extend(self.act(acts)?);
                }
                Err(why) => eprintln!("a frame was dropped: {why}"),
            }
        }
        Ok((told, readable))
    }

    /// Let what was sent go out, and end.
    pub fn close(self) {
        let _ = self.socket.set_linger(LINGER_MS);
    }

    /// A frame with its payload, wherever it lies.
    fn opened(&self, mut frame: wire::Frame) -> wire::Frame {
        let blob = frame.header.get("blob").cloned().unwrap_or(Value::Null);
        if blob.is_null() || !self.session.awaits(frame.text("inReplyTo")) {
            return frame;
        }
        frame.payload = match frame.payload {
            Ok(Value::Null) => wire::referred(&self.session.blobs, &blob),
            _ => Err(("E_BLOB_INVALID", "a payload lies in a frame or in a file".into())),
        };
        frame
    }

    fn act(&mut self, acts: Vec<Act>) -> Result<Vec<(String, Told)>, Over> {
        let mut told = Vec::new();
        for act in acts {
            match act {
                Act::Send(frame) => match self.packed(frame) {
                    Ok(bytes) => self.unsent.push_back(bytes),
                    Err((event_id, code, why)) => {
                        let acts = self.session.fail(&event_id, code, &why);
                        told.extend(self.act(acts)?);
                    }
                },
                Act::Hello { id, awaiting } => {
                    self.unsent.clear();
                    match token(&self.run_dir) {
                        Ok(token) => {
                            let payload = json!({
                                "token": token, "incarnation": self.incarnation, "versions": [1], "awaiting": awaiting,
                            });
                            self.unsent.push_back(wire::pack(&json!({"type": "hello", "id": id, "payload": payload})));
                        }
                        // Perhaps a kernel is just starting: hello is due again in half a second.
                        Err(why) => eprintln!("no token: {why}"),
                    }
                }
                Act::Anew => {
                    self.unsent.clear();
                    match connect(&self.context, &self.run_dir) {
                        Ok(socket) => self.socket = socket,
                        Err(why) => return Err(Over { code: "E_CONNECT".into(), message: why.to_string() }),
                    }
                    self.session.connected(self.now());
                }
                Act::Tell(reference, what) => {
                    let (session, folder) = (&self.session, &self.session.blobs);
                    self.large.retain(|event_id, blob| {
                        let gone = !session.holds(event_id);
                        if gone && matches!(what, Told::Refused(_)) {
                            // Nobody has taken it, so nobody else will.
                            let _ = fs::remove_file(format!("{folder}/{}", blob["file"].as_str().unwrap_or("")));
                        }
                        !gone
                    });
                    told.push((reference, what));
                }
                Act::Over { code, message } => return Err(Over { code, message }),
            }
        }
        self.push();
        Ok(told)
    }

    /// The bytes of a frame. The payload of one that is too large goes into a file, once.
    fn packed(&mut self, mut frame: Value) -> Result<Vec<u8>, (String, &'static str, String)> {
        let bytes = wire::pack(&frame);
        if bytes.len() <= wire::FRAME {
            return Ok(bytes);
        }
        let event_id = frame["eventId"].as_str().unwrap_or("").to_string();
        let folder = &self.session.blobs;
        if folder.is_empty() {
            return Err((event_id, "E_FRAME_TOO_LARGE", format!("{} bytes are too many for a frame", bytes.len())));
        }
        if let Some(blob) = self.large.get(&event_id) {
            // It is still wanted: no sweep may take it.
            let path = format!("{folder}/{}\0", blob["file"].as_str().unwrap_or(""));
            unsafe { libc::utimensat(libc::AT_FDCWD, path.as_ptr().cast(), std::ptr::null(), libc::AT_SYMLINK_NOFOLLOW) };
        } else {
            match wire::refer(folder, &random(16), &frame["payload"], self.session.durable) {
                Ok(blob) => drop(self.large.insert(event_id.clone(), blob)),
                Err(why) => return Err((event_id, "E_DISK_FULL", why.to_string())),
            }
        }
        let header = frame.as_object_mut().expect("a frame is a map");
        header.remove("payload");
        header.insert("blob".into(), self.large[&event_id].clone());
        Ok(wire::pack(&frame))
    }

    fn push(&mut self) {
        while let Some(bytes) = self.unsent.front() {
            if self.socket.send(bytes, zmq::DONTWAIT).is_err() {
                return; // no room, or no connection: then hello comes first, and clears these
            }
            self.unsent.pop_front();
        }
    }
}

fn connect(context: &zmq::Context, run_dir: &str) -> zmq::Result<zmq::Socket> {
    let socket = context.socket(zmq::DEALER)?;
    socket.set_immediate(true)?;
    socket.set_probe_router(true)?;
    socket.set_reconnect_ivl(20)?;
    socket.set_maxmsgsize(wire::FRAME as i64 + ADDED)?;
    socket.set_linger(0)?;
    socket.connect(&format!("ipc://{run_dir}/clients.sock"))?;
    Ok(socket)
}

/// The runtime directory of the kernel that runs for a bundle ("Find a running kernel").
pub fn run_dir_of(bundle: &str) -> Result<String, Over> {
    let none = |why: String| Over { code: "E_KERNEL_NOT_RUNNING".into(), message: format!("no kernel of {bundle}: {why}") };
    let mut path = fs::canonicalize(bundle).map_err(|why| none(why.to_string()))?;
    if path.ends_with("goondan.yaml") {
        path.pop();
    }
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let root = variable("GOONDAN_STATE_ROOT").unwrap_or(format!("{}/.goondan", variable("HOME").unwrap_or_default()));
    let digest = wire::sha256(path.as_os_str().as_bytes());
    let record = format!("{root}/workspaces/{}/kernel/kernel.json", &digest[..16]);
    let record = fs::read(record).map_err(|why| none(why.to_string()))?;
    let record: Value = serde_json::from_slice(&record).map_err(|why| none(why.to_string()))?;
    record["runDir"].as_str().map(String::from).ok_or_else(|| none("its record names no directory".into()))
}

/// The operator's token as it is now. Nobody else may own what leads to the socket: they would get it.
fn token(run_dir: &str) -> Result<String, String> {
    let socket = fs::canonicalize(Path::new(run_dir).join("clients.sock")).map_err(|why| why.to_string())?;
    let me = unsafe { libc::geteuid() };
    for path in socket.ancestors() {
        let owner = fs::metadata(path).map_err(|why| why.to_string())?.uid();
        if owner != 0 && owner != me {
            return Err(format!("{} belongs to another user", path.display()));
        }
    }
    let token = fs::read_to_string(Path::new(run_dir).join("client.token")).map_err(|why| why.to_string())?;
    Ok(token.trim().into())
}

/// So many random bytes, in hexadecimal.
fn random(bytes: usize) -> String {
    let mut read = vec![0; bytes];
    fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut read)).expect("/dev/urandom is there");
    read.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The time of day, as the bus writes it.
fn rfc3339() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()) as libc::time_t;
    let mut at: libc::tm = unsafe { std::mem::zeroed() };
    unsafe { libc::gmtime_r(&seconds, &mut at) };
    let (year, month) = (at.tm_year + 1900, at.tm_mon + 1);
    format!("{year:04}-{month:02}-{:02}T{:02}:{:02}:{:02}Z", at.tm_mday, at.tm_hour, at.tm_min, at.tm_sec)
}
