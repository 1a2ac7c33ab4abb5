//! Which repositories a snapshot goes to.

use vmstrata_repo::{DeviceId, Repository};

use super::Vault;
use super::error::{Result, VaultError};
use super::policy::{OneDevice, Policy};

/// A repository, and how many copies it is to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) repository: usize,
    pub(super) copies: u8,
}

/// What is known of a repository when copies are placed.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    repository: usize,
    device: DeviceId,
    max_copies: u8,
    preferred: bool,
    free_bytes: u64,
}

/// The repositories for critical pages and metadata, those with the most room first, after those that are `preferred`.
///
/// # Errors
/// [`VaultError::TooFewRepositories`], [`VaultError::SharedDevice`].
pub(super) fn choose(vault: &Vault, policy: &Policy, preferred: &[usize]) -> Result<Vec<Share>> {
    let mut candidates = Vec::new();
    for (index, repository) in vault.repositories.iter().enumerate() {
        let free_bytes = room(repository.as_ref())?;
        candidates.push(Candidate {
            repository: index,
            device: repository.device(),
            max_copies: repository.capabilities().max_copies,
            preferred: preferred.contains(&index),
            free_bytes,
        });
    }
    candidates.sort_by_key(|repository| std::cmp::Reverse((repository.preferred, repository.free_bytes)));
    distribute(candidates, policy.critical_copies, policy.one_device)
}

/// Bytes there is room for, as far as the repository can tell.
fn room(repository: &dyn Repository) -> Result<u64> {
    if repository.capabilities().free_space { Ok(repository.free_bytes()?) } else { Ok(u64::MAX) }
}

impl Vault {
    /// How many copies its repositories can keep; with [`OneDevice::Refuse`], of which no device has two, but for a repository
    /// that sees to its copies itself.
    pub fn copies_max(&self, one_device: OneDevice) -> u8 {
        let mut devices = Vec::new();
        let counts = self.repositories.iter().filter(|repository| {
            let is_new = !devices.contains(&repository.device());
            devices.push(repository.device());
            is_new || one_device == OneDevice::Allow
        });
        let copies: usize = counts.map(|repository| usize::from(repository.capabilities().max_copies)).sum();
        u8::try_from(copies).map_or(Policy::MAX_COPIES, |copies| copies.min(Policy::MAX_COPIES))
    }
}

/// The repositories for clean pages: among `shares`, so that every copy is beside one of the metadata; the fullest last.
pub(super) fn choose_clean(vault: &Vault, shares: &[Share], copies: u8) -> Vec<Share> {
    let mut shares = shares.to_vec();
    shares.sort_by_key(|share| {
        std::cmp::Reverse(room(vault.repository(share.repository)).unwrap_or(0) / u64::from(share.copies))
    });
    let mut left = copies;
    for share in &mut shares {
        share.copies = share.copies.min(left);
        left -= share.copies;
    }
    shares.retain(|share| share.copies > 0);
    shares
}

fn distribute(candidates: Vec<Candidate>, wanted: u8, one_device: OneDevice) -> Result<Vec<Share>> {
    let (mut first, mut second) = (Vec::new(), Vec::new());
    let mut devices = Vec::new();
    for candidate in candidates {
        let is_new = !devices.contains(&candidate.device);
        devices.push(candidate.device);
        if is_new { first.push(candidate) } else { second.push(candidate) }
    }
    let room = |repositories: &[Candidate]| {
        repositories.iter().map(|repository| usize::from(repository.max_copies)).sum::<usize>()
    };
    let (apart, all) = (room(&first), room(&first) + room(&second));
    if all < wanted.into() {
        return Err(VaultError::TooFewRepositories { wanted, found: all });
    }
    if apart < wanted.into() && one_device == OneDevice::Refuse {
        return Err(VaultError::SharedDevice { wanted, devices: apart });
    }
    let mut left = wanted;
    let mut shares = Vec::new();
    for repository in first.into_iter().chain(second) {
        let copies = repository.max_copies.min(left);
        left -= copies;
        if copies > 0 {
            shares.push(Share { repository: repository.repository, copies });
        }
    }
    Ok(shares)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repository(repository: usize, device: u64, max_copies: u8) -> Candidate {
        Candidate { repository, device: DeviceId(device), max_copies, preferred: false, free_bytes: 0 }
    }

    fn shares(candidates: &[Candidate], wanted: u8, one_device: OneDevice) -> Result<Vec<(usize, u8)>> {
        let shares = distribute(candidates.to_vec(), wanted, one_device)?;
        Ok(shares.iter().map(|share| (share.repository, share.copies)).collect())
    }

    #[test]
    fn copies_go_to_devices_of_their_own_first() {
        let repositories = [repository(0, 1, 1), repository(1, 1, 1), repository(2, 2, 1)];
        assert_eq!(shares(&repositories, 2, OneDevice::Refuse).unwrap(), [(0, 1), (2, 1)]);
        assert_eq!(shares(&repositories, 3, OneDevice::Allow).unwrap(), [(0, 1), (2, 1), (1, 1)]);
        let refused = shares(&repositories, 3, OneDevice::Refuse);
        assert!(matches!(refused, Err(VaultError::SharedDevice { wanted: 3, devices: 2 })), "{refused:?}");
        let few = shares(&repositories, 4, OneDevice::Allow);
        assert!(matches!(few, Err(VaultError::TooFewRepositories { wanted: 4, found: 3 })), "{few:?}");
    }

    #[test]
    fn a_repository_that_replicates_takes_several() {
        assert_eq!(shares(&[repository(0, 1, 16)], 3, OneDevice::Refuse).unwrap(), [(0, 3)]);
        assert_eq!(
            shares(&[repository(0, 1, 2), repository(1, 2, 1)], 3, OneDevice::Refuse).unwrap(),
            [(0, 2), (1, 1)]
        );
    }
}
