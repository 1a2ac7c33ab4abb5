//! The way back to the frontend: a socket that it hands over, on which the device says that its configuration has
//! changed ("Back-end message types", `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`). The frontend then reads the configuration
//! and interrupts the guest.
//!
//! The `vhost` crate takes the socket out of the message and cannot send this; so the control thread looks at each message
//! before it is handled, and keeps a descriptor of its own. No answer is asked for: nothing here waits for a frontend.
//! Only a unix socket is kept: closing another descriptor may take as long as the frontend likes, and others share the lock.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use parking_lot::Mutex;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recv, recvmsg, send,
    sockopt,
};

/// Request, flags and size, four bytes each, in the machine's order.
const HEADER_LEN: usize = 12;
/// `VHOST_USER_SET_BACKEND_REQ_FD`.
const SET_BACKEND_REQ_FD: u32 = 21;
/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`.
const CONFIG_CHANGE: u32 = 2;
/// Version 1 of the protocol, and no answer wanted.
const FLAGS: u32 = 1;

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct BackChannel {
    socket: Mutex<Option<OwnedFd>>,
}

impl BackChannel {
    /// Keeps the socket that comes with the connection's next message, if that is what it is for. The message stays.
    pub(super) fn look_at(&self, connection: impl AsFd) {
        let mut header = [0; HEADER_LEN];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        // Without room for descriptors none come, whatever the message.
        let Ok((_, HEADER_LEN)) = recv(&connection, &mut header, flags) else { return };
        if word(&header) != SET_BACKEND_REQ_FD {
            return;
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let peeked = recvmsg(
            &connection,
            &mut [IoSliceMut::new(&mut header)],
            &mut ancillary,
            flags | RecvFlags::CMSG_CLOEXEC,
        );
        if peeked.is_err() {
            return;
        }
        let sockets = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(sockets) => Some(sockets),
            _ => None,
        });
        let is_kept = |socket: &OwnedFd| sockopt::socket_domain(socket) == Ok(AddressFamily::UNIX);
        *self.socket.lock() = sockets.flatten().last().filter(is_kept);
    }

    /// The frontend has gone.
    pub(super) fn forget(&self) {
        *self.socket.lock() = None;
    }

    /// Tells the frontend to read the configuration; whether there is one that listens.
    pub(super) fn config_changed(&self) -> bool {
        let message = [CONFIG_CHANGE, FLAGS, 0].map(u32::to_ne_bytes).concat();
        let socket = self.socket.lock();
        let Some(socket) = &*socket else { return false };
        matches!(send(socket, &message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT), Ok(HEADER_LEN))
    }
}

fn word(bytes: &[u8; HEADER_LEN]) -> u32 {
    u32::from_ne_bytes(*bytes.first_chunk().expect("twelve bytes"))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, sendmsg};

    use super::*;

    fn message(request: u32) -> Vec<u8> {
        [request, FLAGS, 0].map(u32::to_ne_bytes).concat()
    }

    fn send_with(to: &UnixStream, request: u32, socket: impl AsFd) {
        let fds = [socket.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
        let bytes = message(request);
        sendmsg(to, &[std::io::IoSlice::new(&bytes)], &mut ancillary, SendFlags::empty()).unwrap();
    }

    #[test]
    fn the_socket_of_that_one_message_is_kept_and_the_message_stays() {
        let channel = BackChannel::default();
        let (mut frontend, mut backend) = UnixStream::pair().unwrap();
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        frontend.write_all(&message(1)).unwrap();
        channel.look_at(&backend);
        assert!(!channel.config_changed(), "another message");
        backend.read_exact(&mut [0; HEADER_LEN]).unwrap();
        send_with(&frontend, SET_BACKEND_REQ_FD, &theirs);
        channel.look_at(&backend);
        let mut bytes = [0; HEADER_LEN];
        backend.read_exact(&mut bytes).unwrap();
        assert_eq!(word(&bytes), SET_BACKEND_REQ_FD, "whoever handles it still finds it");
        assert!(channel.config_changed());
        ours.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes[..], message(CONFIG_CHANGE));
        channel.forget();
        drop(theirs);
        assert!(!channel.config_changed());
        assert_eq!(ours.read(&mut bytes).unwrap(), 0, "nothing keeps it open");
    }

    #[test]
    fn only_a_unix_socket_is_kept() {
        let channel = BackChannel::default();
        let (frontend, backend) = UnixStream::pair().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        send_with(&frontend, SET_BACKEND_REQ_FD, &listener);
        channel.look_at(&backend);
        assert!(channel.socket.lock().is_none());
    }

    /// A frontend that does not read, or hands over what is no socket, does not block the server.
    #[test]
    fn a_frontend_that_does_not_listen_is_not_waited_for() {
        let channel = BackChannel::default();
        let (_deaf, theirs) = UnixStream::pair().unwrap();
        *channel.socket.lock() = Some(theirs.into());
        while channel.config_changed() {}
        *channel.socket.lock() = Some(std::fs::File::open("/dev/null").unwrap().into());
        assert!(!channel.config_changed());
    }
}
