//! Serves one disk: `serve_vhost DISK SOCKET[,SOCKET] [QUEUES [THREADS [POLL_US]]]`. Two sockets let a virtual machine
//! move from one QEMU to another on the same host.
//!
//! Prints what was done when its input ends.

use std::io::Read;
use std::path::Path;

use vmstrata_disk::{Disk, OpenOptions, ResourceOptions, Resources};
use vmstrata_export::vhost_user::{Options, Server};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [disk, socket, rest @ ..] = &arguments[..] else {
        return Err("which disk, and which socket?".into());
    };
    let mut options = Options::default();
    if let Some(queues) = rest.first() {
        options.queues = queues.parse()?;
        options.io_threads = options.io_threads.min(options.queues.into());
    }
    if let Some(threads) = rest.get(1) {
        options.io_threads = threads.parse()?;
    }
    if let Some(poll_us) = rest.get(2) {
        options.poll_us = poll_us.parse()?;
    }
    let journal_dir = Path::new(socket).parent().map(Path::to_owned);
    let resources = Resources::new(ResourceOptions { journal_dir, ..ResourceOptions::default() });
    let disk = Disk::open(Path::new(disk), &OpenOptions::default(), &resources)?;
    let bind = |socket| Server::bind(Path::new(socket), disk.clone(), options.clone());
    let servers: Vec<Server> = socket.split(',').map(bind).collect::<Result<_, _>>()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    for server in servers {
        println!("{}: {:#?}", server.path().display(), server.stats());
        server.shutdown();
    }
    disk.close()?;
    Ok(())
}
