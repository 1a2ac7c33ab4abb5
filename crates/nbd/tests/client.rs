//! Servers that are none, or end in the middle: the client says so, and never waits for them.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;

use vmstrata_nbd::option::{INFO_EXPORT, OptionKind};
use vmstrata_nbd::{
    Client, HandshakeFlags, INIT_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, SIMPLE_REPLY_MAGIC,
};
use vmstrata_nbd::{TransmissionFlags, Uri};
use vmstrata_store::Store as _;
use vmstrata_types::HostOffset;

const SIZE: u64 = 1 << 20;

/// What a client gets of a server that does `serve` with its connection.
fn connect(serve: impl FnOnce(UnixStream) + Send + 'static) -> std::io::Result<Client> {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("nbd");
    let listener = UnixListener::bind(&socket).unwrap();
    thread::spawn(move || serve(listener.accept().unwrap().0));
    let uri = format!("nbd+unix:///web?socket={}", socket.display());
    Client::connect(&Uri::of(Path::new(&uri)).unwrap().unwrap())
}

fn option_reply(kind: u32, data: &[u8]) -> Vec<u8> {
    let head = [&OPTION_REPLY_MAGIC.to_be_bytes()[..], &OptionKind::Go.to_wire().to_be_bytes()].concat();
    [&head[..], &kind.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat()
}

/// Greets, and gives the export away.
fn greet(socket: &mut UnixStream, flags: TransmissionFlags) {
    let hello = [&INIT_MAGIC.to_be_bytes()[..], &OPTION_MAGIC.to_be_bytes()].concat();
    socket.write_all(&hello).unwrap();
    socket.write_all(&HandshakeFlags::FIXED_NEWSTYLE.bits().to_be_bytes()).unwrap();
    // Flags, an option's head, a name of 3 bytes, one item.
    socket.read_exact(&mut [0; 4 + 16 + 4 + 3 + 2 + 2]).unwrap();
    let export = [&INFO_EXPORT.to_be_bytes()[..], &SIZE.to_be_bytes(), &flags.bits().to_be_bytes()].concat();
    socket.write_all(&[option_reply(3, &export), option_reply(1, &[])].concat()).unwrap();
}

const GOOD: TransmissionFlags = TransmissionFlags::HAS_FLAGS.union(TransmissionFlags::SEND_FLUSH);

/// The error of a read of a server that answers with these bytes and ends.
fn read_of(answer: impl FnOnce(u64) -> Vec<u8> + Send + 'static) -> String {
    let client = connect(move |mut socket| {
        greet(&mut socket, GOOD);
        let mut request = [0; 28];
        socket.read_exact(&mut request).unwrap();
        let cookie = u64::from_be_bytes(request[8..16].try_into().unwrap());
        socket.write_all(&answer(cookie)).unwrap();
    });
    let client = client.unwrap();
    let error = client.read_exact(&mut [0; 512], HostOffset::ZERO).unwrap_err().to_string();
    // What is asked for after that is refused at once.
    client.flush().unwrap_err();
    error
}

fn reply(cookie: u64, error: u32) -> Vec<u8> {
    [&SIMPLE_REPLY_MAGIC.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes()].concat()
}

#[test]
fn answers_that_are_none_break_the_connection() {
    assert!(read_of(|cookie| vec![0xff; 16 + cookie as usize]).contains("an answer that is none"));
    assert!(read_of(|cookie| reply(cookie + 7, 0)).contains("an answer to nothing that was asked for"));
    assert!(read_of(|_| Vec::new()).contains("the connection to the NBD server is broken"));
    assert!(read_of(|cookie| reply(cookie, 0)).contains("the connection to the NBD server is broken"));
    assert!(read_of(|cookie| reply(cookie, 28)).contains("No space left"));
    assert!(read_of(|cookie| reply(cookie, 4711)).contains("Input/output error"));
}

#[test]
fn servers_that_a_disk_cannot_lie_on_are_refused() {
    let refused = |serve: Box<dyn FnOnce(UnixStream) + Send>| connect(serve).unwrap_err().to_string();
    let with = |flags| refused(Box::new(move |mut socket| greet(&mut socket, flags)));
    assert!(with(TransmissionFlags::HAS_FLAGS).contains("cannot flush"));
    assert!(with(GOOD | TransmissionFlags::READ_ONLY).contains("read-only"));
    let said = refused(Box::new(|mut socket| socket.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap()));
    assert!(said.contains("no greeting of a newstyle server"), "{said}");
    // It ends at once: whatever the host calls that.
    refused(Box::new(drop));
    let huge = refused(Box::new(|mut socket| {
        let hello = [&INIT_MAGIC.to_be_bytes()[..], &OPTION_MAGIC.to_be_bytes(), &[0, 1]].concat();
        socket.write_all(&hello).unwrap();
        let head = [&OPTION_REPLY_MAGIC.to_be_bytes()[..], &[0, 0, 0, 7, 0, 0, 0, 3, 0xff, 0xff, 0xff, 0xff]]
            .concat();
        socket.write_all(&head).unwrap();
        let _ = socket.read_to_end(&mut Vec::new());
    }));
    assert!(huge.contains("an answer to an option that is none"), "{huge}");
}
