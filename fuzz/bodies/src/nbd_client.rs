//! A client that says anything at all to a server, which must answer or hang up, and stop when told to.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use vmstrata_export::nbd::{Address, Export, Exports, Limits, Listener, Server, TlsMode};

use crate::scratch;

/// Longest silence of a server that owes nothing: machines may be slow, but not so slow.
const PATIENCE: Duration = Duration::from_secs(30);
/// Longer talks are cut here: each 28 bytes may ask for the whole disk.
const TALK_MAX: usize = 16 << 10;

/// Lets a client say `data`, then nothing more, to a server on a small disk.
///
/// # Panics
/// When the server goes on without an end, does not stop, or leaves a disk that is not sound.
pub fn nbd_client(data: &[u8]) {
    let disk = scratch::disk(false);
    let exports = Exports::new();
    exports.add(Export::new("disk", disk.clone()).with_description("a disk")).expect("the first export");
    let limits = Limits { payload_bytes: 4 << 20, requests: 16, shutdown: PATIENCE, ..Limits::default() };
    let server = Server::new(exports, TlsMode::default(), limits).expect("a server");
    let address = Address::Unix(scratch::directory().join("nbd.sock"));
    server.listen(Listener::bind(&address).expect("a socket")).expect("a thread");
    talk(&data[..data.len().min(TALK_MAX)]);
    server.shutdown().expect("a disk that can be flushed");
    // A server keeps its exports for as long as it lives, whether it is up or not.
    drop(server);
    scratch::finish(disk);
}

fn talk(data: &[u8]) {
    let mut socket =
        UnixStream::connect(scratch::directory().join("nbd.sock")).expect("a server that listens");
    socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
    socket.set_write_timeout(Some(PATIENCE)).expect("a socket");
    let mut sender = socket.try_clone().expect("a descriptor");
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // A server may hang up at any word.
            let _ = sender.write_all(data);
            let _ = sender.shutdown(Shutdown::Write);
        });
        let mut buffer = vec![0; 64 << 10];
        loop {
            match socket.read(&mut buffer) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    panic!("the server neither answers nor hangs up")
                }
                Err(_) => return,
            }
        }
    });
}
