//! Serves one disk to one virtual machine at a time: `serve_vhost DISK SOCKET [QUEUES [THREADS [POLL_US]]]`.
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
    let server = Server::bind(Path::new(socket), disk.clone(), options)?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    println!("{:#?}", server.stats());
    server.shutdown();
    disk.close()?;
    Ok(())
}
