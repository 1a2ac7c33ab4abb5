//! The messages one by one: each is checked, then changes the connection's state.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    Error as MessageError, GpuBackend, Result, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures,
    VhostUserVirtioFeatures,
};

use super::super::dirty::DirtyLog;
use super::super::inflight::{InflightError, InflightRegion};
use super::super::memory::{GuestMemory, MAX_REGIONS, RegionInfo};
use super::super::notify;
use super::super::vring::{Kick, RingAddresses};
use super::Backend;

fn refused(error: impl std::error::Error + Send + Sync + 'static) -> MessageError {
    MessageError::ReqHandlerError(std::io::Error::other(error))
}

fn not_offered<T>(what: &'static str) -> Result<T> {
    Err(MessageError::InvalidOperation(what))
}

fn region_info(region: &VhostUserMemoryRegion) -> RegionInfo {
    RegionInfo {
        guest: region.guest_phys_addr,
        len: region.memory_size,
        user: region.user_addr,
        file_offset: region.mmap_offset,
    }
}

fn adopt(file: Option<File>) -> Result<Option<Arc<OwnedFd>>> {
    let adopted = file.map(|file| notify::adopt(file.into()).map(Arc::new));
    adopted.transpose().map_err(MessageError::ReqHandlerError)
}

impl VhostUserBackendReqHandlerMut for Backend {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.forget_driver();
        Ok(())
    }

    /// The memory table stays: frontends that add regions one by one do not send them again.
    fn reset_device(&mut self) -> Result<()> {
        self.forget_driver();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offered())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !self.offered() != 0 {
            return Err(MessageError::FeatureMismatch);
        }
        if features == self.features {
            return Ok(());
        }
        // Without protocol features there is no SET_VRING_ENABLE: rings are enabled from the start.
        let always_enabled = features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0;
        self.change_all(|this| {
            this.features = features;
            this.vrings.iter_mut().for_each(|vring| vring.enabled |= always_enabled);
        });
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        let mut memory = GuestMemory::default();
        for (region, file) in regions.iter().zip(files) {
            memory = self.with_region(&memory, region_info(region), file).map_err(refused)?;
        }
        self.change_all(|this| this.memory = Arc::new(memory));
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let index = self.index(index)?;
        let size = u16::try_from(num).map_err(|_| MessageError::InvalidParam)?;
        if !size.is_power_of_two() || size > self.queue_size_max {
            return Err(MessageError::InvalidParam);
        }
        self.change(index, |vring| vring.size = size);
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let index = self.index(index)?;
        let used_logged_at = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG).then_some(log);
        let addresses = RingAddresses { descriptors, available, used, used_logged_at };
        self.change(index, |vring| vring.addresses = Some(addresses));
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let index = self.index(index)?;
        let base = u16::try_from(base).map_err(|_| MessageError::InvalidParam)?;
        self.change(index, |vring| vring.next_available = base);
        Ok(())
    }

    /// The queue is stopped until the next SET_VRING_KICK.
    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let place = self.index(index)?;
        self.stop(place);
        let vring = &mut self.vrings[place];
        vring.kick = Kick::Unset;
        vring.call = None;
        Ok(VhostUserVringState::new(index, vring.next_available.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let index = self.index(index.into())?;
        let kick = adopt(fd)?.map_or(Kick::Polled, Kick::Event);
        self.change(index, |vring| vring.kick = kick);
        Ok(())
    }

    /// Frontends change this often while a guest masks and unmasks its interrupts: nothing is stopped.
    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let index = self.index(index.into())?;
        let event = adopt(fd)?;
        if event.is_none() && self.vrings[index].call.is_none() {
            return Ok(());
        }
        let notifier = self.notifier(index).map_err(MessageError::ReqHandlerError)?;
        let event = event.as_ref().map(|event| event.as_fd());
        notifier.set(event).map_err(MessageError::ReqHandlerError)?;
        if self.vrings[index].running {
            // The driver may have waited on the old one.
            notify::call(&notifier);
        }
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let index = self.index(index.into())?;
        let err = adopt(fd)?;
        self.change(index, |vring| vring.err = err);
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let offered = self.get_protocol_features()?.bits();
        if features & !offered == 0 { Ok(()) } else { Err(MessageError::FeatureMismatch) }
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.device.queues.into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let index = self.index(index)?;
        if self.vrings[index].enabled != enable {
            self.change(index, |vring| vring.enabled = enable);
        }
        Ok(())
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        Ok(self.device.read(offset as usize, size as usize))
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        if self.device.write(offset as usize, bytes) { Ok(()) } else { Err(MessageError::InvalidParam) }
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, size) = (wanted.num_queues, wanted.queue_size);
        self.check_inflight_shape(queues, size)?;
        // A driver may make its queues larger than what the frontend offers.
        let most = self.queue_size_max;
        let file = InflightRegion::create_file(queues, most).map_err(refused)?;
        Ok((VhostUserInflight::new(InflightRegion::size(queues, most), 0, queues, size), file))
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        let (queues, size) = (inflight.num_queues, inflight.queue_size);
        self.check_inflight_shape(queues, size)?;
        let range = (inflight.mmap_offset, inflight.mmap_size);
        let most = self.queue_size_max;
        let region = InflightRegion::attach(file, range, queues, size, most).map_err(refused)?;
        self.change_all(|this| this.inflight = Some(Arc::new(region)));
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MAX_REGIONS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<u64>> {
        let memory = self.with_region(&self.memory, region_info(region), file).map_err(refused)?;
        self.change_all(|this| this.memory = Arc::new(memory));
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let memory = self.memory.without_region(region_info(region)).map_err(refused)?;
        self.change_all(|this| this.memory = Arc::new(memory));
        Ok(())
    }

    fn set_gpu_socket(&mut self, _gpu: GpuBackend) -> Result<()> {
        not_offered("not a GPU")
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        not_offered("no shared objects")
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        not_offered("no device state to transfer")
    }

    fn check_device_state(&mut self) -> Result<()> {
        not_offered("no device state to transfer")
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        not_offered("no shared memory regions")
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        let dirty = DirtyLog::attach(file, log.mmap_offset, log.mmap_size).map_err(refused)?;
        self.change_all(|this| this.dirty = Some(Arc::new(dirty)));
        Ok(())
    }
}

impl Backend {
    fn index(&self, index: u32) -> Result<usize> {
        let index = index as usize;
        if index < self.vrings.len() { Ok(index) } else { Err(MessageError::InvalidParam) }
    }

    fn offered(&self) -> u64 {
        let of_transport = VhostUserVirtioFeatures::PROTOCOL_FEATURES | VhostUserVirtioFeatures::LOG_ALL;
        self.device.features() | of_transport.bits()
    }

    fn check_inflight_shape(&self, queues: u16, queue_size: u16) -> Result<()> {
        let fits =
            (1..=self.device.queues).contains(&queues) && (1..=self.queue_size_max).contains(&queue_size);
        if fits { Ok(()) } else { Err(refused(InflightError::Shape { queues, queue_size })) }
    }
}
