//! What the devices are like that disks lie on.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::follow::Order;

/// The order that suits the device of a file: on one that rotates the best of the study, on any other none that costs anything.
pub fn order_for(path: &Path) -> Order {
    if is_rotating(path) { Order::Predicted } else { Order::Sequential }
}

/// What the kernel says. A file system of several devices, or of none, does not rotate.
fn is_rotating(path: &Path) -> bool {
    let Ok(about) = fs::metadata(path) else { return false };
    let (major, minor) = (rustix::fs::major(about.dev()), rustix::fs::minor(about.dev()));
    // A partition lies in the directory of its disk.
    let said = |queue: &str| fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/{queue}/rotational"));
    said("queue").or_else(|_| said("../queue")).is_ok_and(|said| said.trim() == "1")
}
