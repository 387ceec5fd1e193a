//! Frames as bytes: msgpack to JSON values and back, with the checks of "What a receiver checks itself".

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;

use rmp::decode::RmpRead;
use rmp::{encode, Marker};
use serde_json::{json, Map, Number, Value};
use sha2::{Digest, Sha256};

/// How deep maps and lists may nest in a payload.
pub const DEPTH: usize = 64;
/// How many values a payload by reference may have, keys included. A frame cannot hold more.
pub const VALUES: usize = 1_048_576;
/// The largest frame that the broker takes, in bytes.
pub const FRAME: usize = 1_048_576;

/// A frame that was read: its header, and its payload, which may be bad by itself.
pub struct Frame {
    pub header: Map<String, Value>,
    pub payload: Result<Value, Refused>,
}

/// Why something was refused: a code, and words for people.
pub type Refused = (&'static str, String);

impl Frame {
    /// A text of the header; empty when it is absent or no text.
    pub fn text(&self, key: &str) -> &str {
        self.header.get(key).and_then(Value::as_str).unwrap_or("")
    }

    /// A field of the payload; nil when there is none.
    pub fn field(&self, key: &str) -> &Value {
        self.payload.as_ref().map_or(&Value::Null, |payload| &payload[key])
    }
}

/// Read a frame. A bad payload leaves the header as it is, so whoever waits can be told.
pub fn frame(bytes: &[u8]) -> Result<Frame, String> {
    let mut rest = bytes;
    let mut header = Map::new();
    let mut payload = Ok(Value::Null);
    for _ in 0..map_length(&mut rest)? {
        let key = match value(&mut rest, 0, &mut VALUES.clone())? {
            Value::String(key) => key,
            _ => return Err("a key is no text".into()),
        };
        if key == "payload" {
            let before = rest;
            skip(&mut rest)?;
            payload = whole(&before[..before.len() - rest.len()]).map_err(|why| ("E_FRAME_INVALID", why));
        } else {
            let read = value(&mut rest, DEPTH, &mut VALUES.clone())?;
            header.insert(key, read);
        }
    }
    if !rest.is_empty() {
        return Err("something comes after the frame".into());
    }
    match header.get("type") {
        Some(Value::String(_)) => Ok(Frame { header, payload }),
        _ => Err("a frame has a type".into()),
    }
}

/// Read one value that is all of `bytes`.
pub fn whole(mut bytes: &[u8]) -> Result<Value, String> {
    let read = value(&mut bytes, DEPTH, &mut VALUES.clone())?;
    if bytes.is_empty() {
        Ok(read)
    } else {
        Err("something comes after the value".into())
    }
}

/// Write a value. Keys are sorted, so the same value has the same bytes each time.
pub fn pack(value: &Value) -> Vec<u8> {
    let mut bytes = Vec::new();
    write(&mut bytes, value);
    bytes
}

fn write(out: &mut Vec<u8>, value: &Value) {
    // A Vec takes every byte, so none of these can fail.
    match value {
        Value::Null => encode::write_nil(out).unwrap(),
        Value::Bool(value) => encode::write_bool(out, *value).unwrap(),
        Value::Number(number) => {
            if let Some(value) = number.as_u64() {
                encode::write_uint(out, value).map(drop).unwrap()
            } else if let Some(value) = number.as_i64() {
                encode::write_sint(out, value).map(drop).unwrap()
            } else {
                encode::write_f64(out, number.as_f64().unwrap_or(0.0)).unwrap()
            }
        }
        Value::String(text) => encode::write_str(out, text).unwrap(),
        Value::Array(items) => {
            encode::write_array_len(out, items.len() as u32).unwrap();
            items.iter().for_each(|item| write(out, item));
        }
        Value::Object(map) => {
            encode::write_map_len(out, map.len() as u32).unwrap();
            for (key, item) in map {
                encode::write_str(out, key).unwrap();
                write(out, item);
            }
        }
    }
}

/// What a marker begins: a value that is there, so many bytes, or so many values.
enum Head {
    Done(Value),
    Real(f64),
    Text(u32),
    Items(u32),
    Pairs(u32),
    /// Binary data or an extension, of so many bytes. Neither is a JSON value.
    Foreign(u32),
}

fn head(rest: &mut &[u8]) -> Result<Head, String> {
    let short = |_| "the frame ends too early".to_string();
    let marker = Marker::from_u8(rest.read_u8().map_err(|_| "the frame ends too early".to_string())?);
    macro_rules! int {
        ($read:ident) => {
            Head::Done(Value::Number(rest.$read().map_err(short)?.into()))
        };
    }
    Ok(match marker {
        Marker::Null => Head::Done(Value::Null),
        Marker::True => Head::Done(true.into()),
        Marker::False => Head::Done(false.into()),
        Marker::FixPos(value) => Head::Done(value.into()),
        Marker::FixNeg(value) => Head::Done(value.into()),
        Marker::U8 => int!(read_data_u8),
        Marker::U16 => int!(read_data_u16),
        Marker::U32 => int!(read_data_u32),
        Marker::U64 => int!(read_data_u64),
        Marker::I8 => int!(read_data_i8),
        Marker::I16 => int!(read_data_i16),
        Marker::I32 => int!(read_data_i32),
        Marker::I64 => int!(read_data_i64),
        Marker::F32 => Head::Real(rest.read_data_f32().map_err(short)?.into()),
        Marker::F64 => Head::Real(rest.read_data_f64().map_err(short)?),
        Marker::FixStr(length) => Head::Text(length.into()),
        Marker::Str8 => Head::Text(rest.read_data_u8().map_err(short)?.into()),
        Marker::Str16 => Head::Text(rest.read_data_u16().map_err(short)?.into()),
        Marker::Str32 => Head::Text(rest.read_data_u32().map_err(short)?),
        Marker::FixArray(length) => Head::Items(length.into()),
        Marker::Array16 => Head::Items(rest.read_data_u16().map_err(short)?.into()),
        Marker::Array32 => Head::Items(rest.read_data_u32().map_err(short)?),
        Marker::FixMap(length) => Head::Pairs(length.into()),
        Marker::Map16 => Head::Pairs(rest.read_data_u16().map_err(short)?.into()),
        Marker::Map32 => Head::Pairs(rest.read_data_u32().map_err(short)?),
        Marker::Bin8 => Head::Foreign(rest.read_data_u8().map_err(short)?.into()),
        Marker::Bin16 => Head::Foreign(rest.read_data_u16().map_err(short)?.into()),
        Marker::Bin32 => Head::Foreign(rest.read_data_u32().map_err(short)?),
        Marker::FixExt1 => Head::Foreign(2),
        Marker::FixExt2 => Head::Foreign(3),
        Marker::FixExt4 => Head::Foreign(5),
        Marker::FixExt8 => Head::Foreign(9),
        Marker::FixExt16 => Head::Foreign(17),
        Marker::Ext8 => Head::Foreign(u32::from(rest.read_data_u8().map_err(short)?) + 1),
        Marker::Ext16 => Head::Foreign(u32::from(rest.read_data_u16().map_err(short)?) + 1),
        Marker::Ext32 => Head::Foreign(rest.read_data_u32().map_err(short)?.saturating_add(1)),
        Marker::Reserved => return Err("no msgpack".into()),
    })
}

fn take<'a>(rest: &mut &'a [u8], length: u32) -> Result<&'a [u8], String> {
    if (length as usize) > rest.len() {
        return Err("the frame ends too early".into());
    }
    let (taken, left) = rest.split_at(length as usize);
    *rest = left;
    Ok(taken)
}

fn map_length(rest: &mut &[u8]) -> Result<u32, String> {
    match head(rest)? {
        Head::Pairs(length) => Ok(length),
        _ => Err("a frame is a map".into()),
    }
}

/// One value, `depth` levels deep at most. Nothing is allocated for what a length only promises.
fn value(rest: &mut &[u8], depth: usize, left: &mut usize) -> Result<Value, String> {
    *left = left.checked_sub(1).ok_or("too many values")?;
    let inner = || depth.checked_sub(1).ok_or("it nests too deep".to_string());
    match head(rest)? {
        Head::Done(value) => Ok(value),
        Head::Real(value) => Number::from_f64(value).map(Value::Number).ok_or("a number is not finite".into()),
        Head::Text(length) => std::str::from_utf8(take(rest, length)?)
            .map(|text| Value::String(text.into()))
            .map_err(|_| "a text is no UTF-8".into()),
        Head::Items(length) => {
            let inner = inner()?;
            let mut items = Vec::new();
            for _ in 0..length {
                items.push(value(rest, inner, left)?);
            }
            Ok(Value::Array(items))
        }
        Head::Pairs(length) => {
            let inner = inner()?;
            let mut map = Map::new();
            for _ in 0..length {
                match value(rest, inner, left)? {
                    Value::String(key) => map.insert(key, value(rest, inner, left)?),
                    _ => return Err("a key is no text".into()),
                };
            }
            Ok(Value::Object(map))
        }
        Head::Foreign(_) => Err("bytes and extensions are no JSON values".into()),
    }
}

/// Pass over one value without recursion, whatever is wrong inside of it.
fn skip(rest: &mut &[u8]) -> Result<(), String> {
    let mut open: u64 = 1;
    while open > 0 {
        open -= 1;
        match head(rest)? {
            Head::Done(_) | Head::Real(_) => {}
            Head::Text(length) | Head::Foreign(length) => drop(take(rest, length)?),
            Head::Items(length) => open += u64::from(length),
            Head::Pairs(length) => open += 2 * u64::from(length),
        }
    }
    Ok(())
}

/// SHA-256 in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Read the bytes of a payload by reference ("Large payloads"): what `blob` says of a file in `folder`.
pub fn referred(folder: &str, blob: &Value) -> Result<Value, Refused> {
    let invalid = || ("E_BLOB_INVALID", "the reference is not as it should be".to_string());
    let hex = |key: &str, length: usize| match blob[key].as_str() {
        Some(text) if text.len() == length && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) => {
            Ok(text.to_string())
        }
        _ => Err(invalid()),
    };
    let (file, digest) = (hex("file", 32)?, hex("digest", 64)?);
    let size = match blob["size"].as_u64() {
        Some(size) if (1..=67_371_008).contains(&size) => size,
        Some(size) if size > 0 => return Err(("E_FRAME_TOO_LARGE", format!("a payload of {size} bytes"))),
        _ => return Err(invalid()),
    };
    if folder.is_empty() {
        return Err(("E_BLOB_UNAVAILABLE", "this client has no folder of large payloads".into()));
    }
    let missing = |error: std::io::Error| ("E_BLOB_MISSING", error.to_string());
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(format!("{folder}/{file}"))
        .map_err(missing)?;
    let about = opened.metadata().map_err(missing)?;
    if !about.is_file() {
        return Err(("E_BLOB_MISSING", "it is no file".into()));
    }
    let mismatch = || ("E_BLOB_MISMATCH", "the file has other bytes".to_string());
    if about.len() != size {
        return Err(mismatch());
    }
    let mut bytes = Vec::with_capacity(size as usize);
    opened.take(size + 1).read_to_end(&mut bytes).map_err(missing)?;
    if bytes.len() as u64 != size || sha256(&bytes) != digest {
        return Err(mismatch());
    }
    whole(&bytes).map_err(|why| ("E_FRAME_INVALID", why))
}

/// Write a payload into a file of `folder`, for good if it has to survive a loss of power. Gives what `blob` says of it.
pub fn refer(folder: &str, name: &str, payload: &Value, durable: bool) -> std::io::Result<Value> {
    let bytes = pack(payload);
    let path = format!("{folder}/{name}");
    let mut file =
        OpenOptions::new().write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(path)?;
    file.write_all(&bytes)?;
    if durable {
        file.sync_all()?;
        File::open(folder)?.sync_all()?;
    }
    Ok(json!({"file": name, "digest": sha256(&bytes), "size": bytes.len()}))
}
